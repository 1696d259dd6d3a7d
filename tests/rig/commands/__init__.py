"""Commands of `launch/chaos.sh`: faults in a training (`chaos`) and in any elastic script (`script`)."""
