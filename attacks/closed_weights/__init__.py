"""Attack models whose weights are permuted and private: the server of STIP reads its users (paper, appendix I)."""
