"""Why an attempt ended: causes of failures, and evidence of hangs."""
