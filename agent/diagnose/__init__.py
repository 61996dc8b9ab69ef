"""Why an attempt ended: the causes of failures, and the evidence of hangs."""
