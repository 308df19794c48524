"""Two policies that docs/custom-policies.md walks through."""
