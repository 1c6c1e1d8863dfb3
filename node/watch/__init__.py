"""`swarmentum watch`: an independent implementation that follows a run from outside. Knows neither torch nor hivemind."""
