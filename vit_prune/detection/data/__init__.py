"""Images and objects in COCO's format."""
