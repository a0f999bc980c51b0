"""The hardware: the link between device and host memory, NUMA nodes, rates that are measured."""
