"""How commands find a server's HTTP API (`endpoint`) and call it (`client`). Every failure is one line."""
