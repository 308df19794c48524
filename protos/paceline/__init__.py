"""What the services share: the protocol (`v1`), its plain fields (`request_fields`), and the client (`client`)."""
