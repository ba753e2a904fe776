"""The embedded family: small models trained here, so that everything can be tried without a
download.
"""

from pathlib import Path

FAMILY = Path(__file__).parent / "family"  # target/, draft/ (the autoregressive parent) and pard/
# drafters for a public chat model (`public_model.py`): eagle3/ and ppd/
PUBLIC = Path(__file__).parent / "public"
QUESTIONS = Path(__file__).parent / "questions.jsonl"
# for models from the Hub, which were not taught the family's tasks
GENERAL = Path(__file__).parent / "general.jsonl"
