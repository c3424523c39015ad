"""What a suite needs: cores, memory and replicas for a load, and how many workers a tier should have."""
