"""Private-inference schemes whose permutations the lab attacks, as protocols: STIP, Centaur, PermLLM."""
