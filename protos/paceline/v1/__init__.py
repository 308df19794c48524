"""The protocol: messages and services, generated from the .proto files here."""
