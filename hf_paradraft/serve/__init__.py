"""An OpenAI endpoint with drafters: a scheduler over `step(batch)`, and its HTTP interface."""
