"""The first values of a partitioned model: buffers, the meta device, files of weights."""
