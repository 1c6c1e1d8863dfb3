"""A trained model as a folder that Hugging Face loads (`model_folder`), its `card`, and a dry run of both (`first_look`)."""
