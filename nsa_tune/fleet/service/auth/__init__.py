"""Who may use the service: tokens, and the gate that asks for one."""
