"""How the embedded family was made; left out of the wheel."""
