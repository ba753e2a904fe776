"""`python -m hf_paradraft.cli`."""

from . import main

main()
