"""Parts of `bench.gpu` (loads, shapes, measurements on a GPU), and `make bench-host`."""
