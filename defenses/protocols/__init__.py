"""Run private-inference schemes as protocols: STIP, Centaur and PermLLM, whose permutations the attacks target."""
