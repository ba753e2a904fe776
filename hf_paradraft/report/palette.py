"""The colours of all figures and pages: accepted, target, drafter, engine, the rest."""

GREEN, BLUE, ORANGE, GREY = "#2e9d5b", "#3b76c4", "#e08a2e", "#8a929c"
