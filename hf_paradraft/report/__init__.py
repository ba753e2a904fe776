"""Tables and figures from JSON rows; knows no drafter. Colours stand for: accepted, target,
drafter, the rest.
"""

GREEN, BLUE, ORANGE, GREY = "#2e9d5b", "#3b76c4", "#e08a2e", "#8a929c"
