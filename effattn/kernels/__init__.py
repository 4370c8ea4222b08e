"""The engines that backends share."""
