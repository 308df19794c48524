"""The three policies that docs/custom-policies.md explains."""
