"""Quality of our quantisers beside others': same data, same harness, two models."""
