"""What merging costs and saves on the real UNet shapes. Not part of the published pack."""
