"""What `launch/chaos.sh` runs: faults in a training (`chaos`) and in any elastic script (`script`)."""
