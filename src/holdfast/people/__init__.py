"""Who is who: people, their roles, tokens, and what they did."""
