"""An OpenAI endpoint that drafts: a scheduler over `step(batch)`, and the HTTP in front of it."""
