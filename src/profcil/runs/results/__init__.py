"""The results store: one CSV row per run."""
