"""The processes, shards and threads that train one model together."""
