"""One round after another: who trains next, what came back, and the step that follows."""
