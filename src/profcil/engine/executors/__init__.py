"""Ways to run one round's turns: one after another, or the phases of all participants together."""
