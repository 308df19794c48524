"""`paceline certs`: a certificate authority and certificates for development. It may import `services.runtime.tls`."""
