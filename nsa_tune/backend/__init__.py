"""What an engine needs to decide: decision points, latency models, the dispatcher, plug-ins."""
