"""When the speed of runs changed permanently over the nights in which they were measured."""
