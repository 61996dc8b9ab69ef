"""From journals to answers: tables, rankings and figures."""
