"""Break a local stack on purpose, in front of people: what `everroll demo --chaos` does."""
