"""Virtual time and formulas, beside what the five papers publish or say in words."""
