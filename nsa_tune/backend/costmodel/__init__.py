"""From measurements to times: fitted latency models, surfaces, and regret."""
