"""What many, large or hostile requests cost other clients."""
