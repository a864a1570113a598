"""Dead letters and suspended jobs: what people do with them (requirements D3–D6)."""
