"""What both training scripts share; nothing here sends or receives."""
