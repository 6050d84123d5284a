"""Whether a model treats its samples apart: a few rows looked at alone, together, and in other company."""
