"""Tables and figures from JSON rows; knows no drafter."""
