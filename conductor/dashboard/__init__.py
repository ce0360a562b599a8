"""Pages for people: /dashboard, what the cluster is doing, live, and /docs, the routes and a form to try them."""
