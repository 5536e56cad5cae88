"""What the runtime needs: batches, decision points, guards, policies and the dispatcher."""
