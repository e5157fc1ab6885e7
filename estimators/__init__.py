"""A run file in, a CreateTrainingJob request out: typed models, pure request, real SDK."""
