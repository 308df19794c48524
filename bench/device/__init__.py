"""Parts of `bench.gpu`: loads, shapes and measurements on a GPU."""
