"""`paceline doctor`: what `paceline up` would refuse on this machine, and what will be slow and why.

`main` runs the checks and prints them. `host`, `gpu`, `ports` and `checkpoint` each read facts of the machine and judge
them; the judging functions take the facts as arguments. What a worker refuses comes from gpu_worker.inspection.
"""
