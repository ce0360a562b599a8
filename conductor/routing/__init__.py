"""What a policy is shown and what it costs: requests, workers, links, profiles."""
