"""What was measured: one streamed reply, one stage of load, the SLO. No socket, event loop or clock."""
