"""What is sent and when: arrivals, workloads, traces, prompt texts, and the search for the highest rate. No socket,
event loop or clock: times are numbers that the runner waits for."""
