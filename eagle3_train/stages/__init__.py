"""One file per verb, with helpers of its name; verbs never import one another."""
