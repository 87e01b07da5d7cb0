"""What the replies of all three APIs have in common: one table of shapes, one set of oracles, one
generator."""
